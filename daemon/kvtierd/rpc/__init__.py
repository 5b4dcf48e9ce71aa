"""How clients reach the cache: gRPC services, the session stream, the side socket for descriptors.

Imports the cache façade and core values, never what lies behind the façade.
"""
