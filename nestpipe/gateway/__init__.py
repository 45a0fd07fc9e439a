"""The gateway in front of serving instances: router, cascade, candidate retrieval, supervisor, nginx, Ray."""
