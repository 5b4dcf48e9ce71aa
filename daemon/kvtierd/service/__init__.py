"""The daemon as a service: it is built, started, reported to the service manager and taken down."""
