"""Adapters for training frameworks. Each module needs its framework, and nothing else imports it."""
