"""What `help(kvtier.Client)` says: every keyword with type, default, unit and meaning."""

import inspect
import pydoc
import re
from typing import Any, get_type_hints

import kvtier
import kvtier.aio
import pytest
from kvtier.base import ClientBase

AnyClient = ClientBase[Any, Any, Any, Any]
CLIENTS = (kvtier.Client, kvtier.aio.Client)
KEYWORD = re.compile(r"(?P<name>\w+): (?P<type>.+?)(, default (?P<default>.+))?")
NOT_A_QUANTITY = {"instance", "namespace", "role", "memory", "socket", "program", "groups", "on_ready"}
KNOWN = vars(kvtier) | {"os": __import__("os"), "Sequence": __import__("collections").abc.Sequence}


def keywords(client: type[AnyClient]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(client).parameters)


def described(client: type[AnyClient]) -> dict[str, tuple[str, str | None, str]]:
    """What the help says of each keyword: its type, its default, and its meaning."""
    text = pydoc.plain(pydoc.render_doc(client))
    block = re.search(r"__init__\(self, \*.*?\n( \|      .*?)\n \|  \n? ?\|?  \S", text, flags=re.DOTALL)
    assert block is not None, "help shows the constructor"
    found: dict[str, tuple[str, str | None, str]] = {}
    name = None
    for line in (line[8:] for line in block[1].splitlines()):
        if match := KEYWORD.fullmatch(line):
            name = match["name"]
            found[name] = (match["type"], match["default"], "")
        elif line.startswith("    ") and name is not None:
            kind, default, meaning = found[name]
            found[name] = (kind, default, f"{meaning} {line.strip()}".strip())
    return found


@pytest.mark.parametrize("client", CLIENTS)
class TestHelp:
    def test_it_lists_every_keyword_of_the_signature_with_a_meaning(self, client: type[AnyClient]) -> None:
        assert list(described(client)) == list(keywords(client))
        assert [name for name, (_, _, meaning) in described(client).items() if len(meaning) < 40] == []

    def test_types_and_defaults_are_those_of_the_signature(self, client: type[AnyClient]) -> None:
        for name, (kind, default, _) in described(client).items():
            parameter = keywords(client)[name]
            assert kind == _shown(parameter.annotation), name
            if parameter.default is inspect.Parameter.empty:
                assert default is None, name
            else:
                assert default is not None, name
                assert eval(default, dict(KNOWN)) == parameter.default, name

    def test_a_quantity_has_its_range(self, client: type[AnyClient]) -> None:
        for name, (_, _, meaning) in described(client).items():
            assert name in NOT_A_QUANTITY or re.search(r"\d[\d,.e]* to |from 0", meaning), name

    def test_client_options_are_the_same_keywords_with_the_same_types(self, client: type[AnyClient]) -> None:
        hints = get_type_hints(kvtier.ClientOptions)
        assert hints == {name: parameter.annotation for name, parameter in keywords(client).items()}
        required = {name for name, one in keywords(client).items() if one.default is inspect.Parameter.empty}
        assert kvtier.ClientOptions.__required_keys__ == required

    @pytest.mark.parametrize("method", ["lookup", "store", "load"])
    def test_calls_say_what_each_argument_is_and_its_shape(
        self, method: str, client: type[AnyClient]
    ) -> None:
        called = getattr(client, method)
        text = inspect.getdoc(called) or ""
        arguments = [name for name in inspect.signature(called).parameters if name != "self"]
        assert [name for name in arguments if not re.search(rf"^{name}: \w", text, re.MULTILINE)] == []
        if "hashes" in arguments:
            assert "uint8 array of shape (n, hash_bytes)" in re.sub(r"\s+", " ", text)
        if "block_ids" in arguments:
            assert "integer array of shape (n,)" in re.sub(r"\s+", " ", text)
        if "timeout_s" in arguments:
            assert "seconds" in text


def _shown(annotation: object) -> str:
    """A type as people write it."""
    if annotation == kvtier.Shareable | kvtier.DeviceShareable | None:
        return "Memory | None"
    text = inspect.formatannotation(annotation)
    return re.sub(r"(?:\w+\.)+(?=[A-Z]\w*)", lambda match: "os." if match[0] == "os." else "", text)


def test_an_unknown_keyword_is_refused() -> None:
    namespace = kvtier.Namespace(model="m", kv_dtype="f", hash_scheme="h")
    with pytest.raises(TypeError, match="world_sise"):
        kvtier.Client(instance="i", namespace=namespace, role=kvtier.Role.SCHEDULER, world_sise=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="instance"):
        kvtier.Client(namespace=namespace)  # type: ignore[call-arg]
