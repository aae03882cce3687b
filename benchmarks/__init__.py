"""Side by side with the peers; refuses to time a wrong result."""
