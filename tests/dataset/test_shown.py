"""A plan, stats and an epoch's summary, as shown by a prompt, by a notebook, and as plain values."""

from __future__ import annotations

import inspect
import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from helpers import is_a_sentence
from torch.utils.data import TensorDataset

import hotset


class Bold:
    """A transform whose name looks like markup."""

    def __call__(self, sample: Any) -> Any:
        return sample


Bold.__name__ = Bold.__qualname__ = "<b>Bold&"


def source() -> TensorDataset:
    return TensorDataset(torch.arange(12.0).view(4, 3), torch.arange(4))


class _Cells(HTMLParser):
    """The texts of a document's cells, and its tags."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ended: list[str] = []
        self.texts: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.ended.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_prompt_shows_the_plan_as_print_does_and_a_notebook_the_same_in_tables() -> None:
    with hotset.cache(source(), memory="1MiB", transform=Bold()) as cached:
        plan = cached.plan
        assert repr(plan) == str(plan)
        found = _Cells(plan._repr_html_())
    assert sorted(found.tags) == sorted(found.ended)
    assert set(found.tags) == {"table", "tr", "th", "td"}, "and no tag of a name's"
    assert "<b>Bold&" in found.texts
    assert {plan.fingerprint, "TensorDataset", "cached"} <= set(found.texts)
    for text in found.texts:
        assert text in str(plan)


def test_a_plan_as_plain_values() -> None:
    window = hotset.Window(2, replace=0.5)
    for how in ({"memory": "1MiB"}, {"window": window}):
        with hotset.cache(source(), transform=[Bold()], **how) as cached:  # type: ignore[arg-type]
            plan = cached.plan
        found = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
        keys = "name fingerprint samples used sample_bytes sample_seconds limit held room total_bytes fits"
        assert " ".join(found) == f"{keys} spill audited window transforms notes warnings"
        assert (found["samples"], found["used"]) == (4, plan.used)
        assert [row["name"] for row in found["transforms"]] == ["TensorDataset", "<b>Bold&"]
        assert [row["cached"] for row in found["transforms"]] == [True, True]
        assert found["notes"] == list(plan.notes)
        assert (found["window"] or {}).get("resident") == (2 if "window" in how else None)


def test_stats_and_a_summary_as_plain_values() -> None:
    with hotset.cache(source(), memory="1MiB") as cached:
        loader = hotset.DataLoader(cached, batch_size=2)
        for _ in range(2):
            for _ in loader:
                pass
        stats, summary = cached.stats(), loader.last_epoch
    found = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    whole = {"cached": 4, "uncached": 0, "spilled": 0, "bytes": stats.bytes, "hits": 4, "misses": 4}
    none = {"late": 0, "replaced": 0, "peer_hits": 0, "peers": {}, "audited": 0, "audit_rate": 0.0}
    assert found == {**whole, **none, "fill_seconds": stats.fill_seconds, "hit_rate": 0.5}
    assert summary is not None
    assert repr(summary) == str(summary)
    told = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert told["seconds"] == summary.seconds > 0
    assert told["waited"] == summary.waited
    del told["seconds"], told["waited"]
    assert told == {"number": 1, "batches_expected": 2, "batches": 2, "samples": 4, "hit_rate": 1.0}
    assert {name for name in dir(summary) if not name.startswith("_")} == {
        *told,
        "seconds",
        "waited",
        "to_dict",
        "log_to",
    }


@pytest.mark.parametrize(
    ("given", "named", "advice"),
    [
        (["1GiB"], {}, "write memory='1GiB'"),
        ([1 << 30], {}, "write memory=1073741824"),
        ([len], {}, "write transform="),
        ([], {"transforms": [len]}, "write transform="),
        ([], {"memroy": "1GiB"}, "write memory="),
        ([], {"colour": "red"}, "its arguments are dataset, transform, memory"),
    ],
)
def test_a_call_with_wrong_arguments_says_what_to_write(
    given: list[Any], named: dict[str, Any], advice: str
) -> None:
    with pytest.raises(TypeError) as caught:
        hotset.cache(source(), *given, **named)
    assert advice in str(caught.value)
    assert is_a_sentence(str(caught.value))


def test_the_signature_and_errors_from_inside_are_unchanged() -> None:
    assert list(inspect.signature(hotset.cache).parameters)[:3] == ["dataset", "transform", "memory"]
    with pytest.raises(TypeError, match="must be given a dataset"):
        hotset.cache()  # type: ignore[call-arg]

    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        hotset.cache(Broken(torch.arange(3)), memory="1MiB")
