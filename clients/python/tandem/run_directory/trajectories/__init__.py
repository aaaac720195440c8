"""The responses that a run keeps: what a file of them holds, writing it beside the steps, reading.

record.py has the keys of a response as JSON, columns.py the columns of the Parquet files, files.py
reads both these files and the JSON lines of earlier releases, writer.py writes in a thread.
"""
