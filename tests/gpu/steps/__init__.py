"""The steps of the matrix, one idea each. A module's `run(bench)` measures and keeps rows; its docstring says
how."""
