"""How clients reach the cache: the gRPC services, the session stream, and the side socket for descriptors.

It imports the cache façade and the core's values, never what lies behind the façade.
"""
