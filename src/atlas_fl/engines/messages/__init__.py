"""What is said on the stream: jobs and updates, and of a model only what the other end does not hold yet."""
