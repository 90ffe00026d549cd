"""A thin client of etcd's v3 API, over gRPC and over JSON, and a local cluster for experiments."""
