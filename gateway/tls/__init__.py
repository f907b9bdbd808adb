"""TLS of the ports: certificates, and the connections that use them."""
