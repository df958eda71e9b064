"""The SQS protocol over the queues of a server: AWS JSON 1.0 and Query."""
