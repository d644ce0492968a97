"""The master's gRPC surface: each file turns one service's calls into functions of requests and the cluster."""
