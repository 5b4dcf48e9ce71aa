"""`python -m tests.gpu.children MODULE SOCKET_FD`"""

import sys

from tests.gpu.parts.child import main

main(sys.argv[1], int(sys.argv[2]))
