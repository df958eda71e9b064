"""The lake in a catalogue: its tables, and views over them, by name.

views.py         the views, in SQL that DuckDB, polars and Spark understand; docs/lake.md lists them
duckdb_file.py   a DuckDB file with a view for each table
spark_schema.py  tables of a Spark catalogue: in memory, Hive, Glue or Unity, as Spark is configured
"""
