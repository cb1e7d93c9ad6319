"""The server on Ray Serve: models with replicas on a cluster, whose number follows the load."""
