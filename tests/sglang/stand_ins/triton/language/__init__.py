"""Names of Triton's language, each of which is a class."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = globals()[name] = type(name, (), {"__init__": lambda self, *arguments, **named: None})
    return made
