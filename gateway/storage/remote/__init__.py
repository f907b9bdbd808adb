"""Repositories in object storage: S3, Google Cloud Storage and Azure."""
