"""The decision on each request before it is submitted: quotas, deadlines, predicted waits."""
