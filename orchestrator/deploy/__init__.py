"""Deployments: a configuration in, the files with which it runs on a cluster out."""
