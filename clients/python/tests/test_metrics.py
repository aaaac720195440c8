"""Lines of metrics.jsonl."""

import json
import math

from tandem.metrics import CRITIC_KEYS, KEYS, step_line


def test_a_line_has_exactly_the_documented_keys():
    line = step_line({"step": 3, "loss/total": math.inf, "unheard/of": 1.0})
    assert tuple(line) == KEYS
    assert line["step"] == 3
    assert line["loss/total"] is None
    assert tuple(step_line({"critic/loss": 0.5})) == KEYS + CRITIC_KEYS


def test_tokens_are_whole_numbers():
    line = step_line({"tokens/prompt": 12.0, "reward/mean": 1.0})
    assert json.dumps([line["tokens/prompt"], line["reward/mean"]]) == "[12, 1.0]"
