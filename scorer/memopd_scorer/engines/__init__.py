"""Who runs the shards of a scoring run; every engine writes the same folder.

An engine is a function of a job that leaves a finished folder behind. `local` is one process.
"""
