ARG BASE=cloudckpt-test
FROM ${BASE}
COPY docker/local-s3.sh /usr/local/bin/minio
RUN ln -s minio /usr/local/bin/mc
ENTRYPOINT ["minio"]
