"""The sum of what campaigns counted is right, and too little is not taken for a proof."""

import xml.etree.ElementTree as ElementTree

from tools.fault_counts import counted, shortfalls, total

RESULTS = """<testsuites><testsuite>
<testcase name="a"><properties>
  <property name="count.daemon_kills" value="3"/><property name="count.wrong_bytes" value="0"/>
  <property name="proved" value="a sentence"/>
</properties></testcase>
<testcase name="b"><properties><property name="count.daemon_kills" value="4"/>
  <property name="count.lost_blocks" value="0"/></properties><failure message="it did"/></testcase>
<testcase name="c"/>
</testsuite></testsuites>"""


def test_counts_of_all_tests_are_added_up_also_of_those_that_failed() -> None:
    counts = counted(ElementTree.fromstring(RESULTS).iter("testcase"))
    assert counts == {"daemon_kills": 7, "wrong_bytes": 0, "lost_blocks": 0}


def test_too_little_too_much_and_nobody_looked_are_told() -> None:
    least = {"daemon_kills": 7, "client_kills": 1}
    right = {"daemon_kills": 7, "client_kills": 2, "wrong_bytes": 0, "lost_blocks": 0}
    assert list(shortfalls(right, least)) == []
    assert list(shortfalls(right | {"daemon_kills": 6}, least)) == ["6 daemon kills, 7 are wanted"]
    assert list(shortfalls(right | {"wrong_bytes": 2}, least)) == ["2 wrong bytes"]
    del right["wrong_bytes"], right["client_kills"]
    assert list(shortfalls(right, least)) == [
        "0 client kills, 1 are wanted",
        "nobody has looked for wrong bytes",
    ]
    assert list(shortfalls({}, {})) == []


def test_what_was_looked_for_and_never_found_stays_in_the_sum() -> None:
    parts = [{"daemon_kills": 3, "wrong_bytes": 0}, {"daemon_kills": 4, "lost_blocks": 0}]
    assert total(parts) == {"daemon_kills": 7, "wrong_bytes": 0, "lost_blocks": 0}
    assert "wrong_bytes" in total(parts)
