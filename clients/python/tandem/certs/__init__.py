"""Certificates and tokens of a cluster: `tandem certs`."""
