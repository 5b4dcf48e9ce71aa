"""The worker of a store that other hosts use as well."""
