"""What Holdfast is tested with, shipped: run it on your own backend, and move time in your own tests."""
