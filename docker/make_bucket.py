"""Create the bucket that the S3 tests use."""

import os

import boto3

client = boto3.client(
    "s3",
    endpoint_url=os.environ["CLOUDCKPT_TEST_S3_ENDPOINT"],
    aws_access_key_id=os.environ["CLOUDCKPT_TEST_S3_KEY"],
    aws_secret_access_key=os.environ["CLOUDCKPT_TEST_S3_SECRET"],
    region_name="us-east-1",
)
bucket = os.environ["CLOUDCKPT_TEST_S3_BUCKET"]
client.create_bucket(Bucket=bucket)
print(f"bucket {bucket} is there")
