"""The host pool: one shared file that outlives the daemon, and the decision what to keep of it after a
restart.

Nothing is imported here: a worker needs a few of these modules only, and starts sooner without the others.
"""
