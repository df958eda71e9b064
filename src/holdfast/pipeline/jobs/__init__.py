"""The jobs: each one is `run(spark, config)`, and tells what it did."""
