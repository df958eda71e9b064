"""The synchronous handles, generated from the asynchronous ones."""
