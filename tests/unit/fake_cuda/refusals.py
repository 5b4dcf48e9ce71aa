"""What the double of the driver refuses."""

from collections.abc import Callable

import pytest

from tests.unit.fake_cuda.raw import Failed


def refused(code: int, function: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(Failed) as failure:
        function(*arguments)
    assert failure.value.code == code, failure.value
