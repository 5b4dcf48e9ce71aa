"""Constants of the contract that `kvtierctl` needs as well, which does not import the daemon for them."""

PROTOCOL_VERSIONS = (1,)
"""Those that this daemon speaks."""
TOKEN_METADATA = "kvtier-token-bin"
"""Key of the metadata by which a caller of Admin says which side connection is its own."""
ERROR_METADATA = "kvtier-error-bin"
"""Key of a refused unary call's trailing metadata; the value is a serialised kvtier.v1.Error."""
