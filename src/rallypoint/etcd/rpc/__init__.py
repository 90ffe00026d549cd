"""gRPC over HTTP/2, as far as a server's calls to etcd need it."""
