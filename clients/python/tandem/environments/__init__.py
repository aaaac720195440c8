"""Environments: classes of the user's that a model talks with, turn by turn.

contract.py loads a class and finds its tools, template.py writes what is said between two turns,
tool_calls.py reads the calls in a model's text, live.py is an environment of one episode, calls.py
makes its calls in threads, processes.py in processes, in which worker.py runs, episode.py keeps one
episode and its limits, driver.py drives many at once.
"""
