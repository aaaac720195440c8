"""`tandem view`: trajectories on a terminal, without one, and as an HTML page."""

import base64
import io
import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import records, tandem
from PIL import Image
from rich.cells import cell_len
from screens import WIDTHS, Screen

import tandem as package
from tandem.errors import ConfigError, RunDirectoryError
from tandem.run_directory.trajectories.files import STEPS, Head, trajectory_files
from tandem.view.about import About, about
from tandem.view.page import page
from tandem.view.terminal import print_trajectories
from tandem.view.trajectories import Chosen, Filter, Range, Trajectory, recorded


class Letters:
    """A codec whose ids are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def token_texts(self, ids):
        return list(map(chr, ids))


def record(prompt, response, mask=None, reward=0.5, **others):
    length = len(response)
    return {
        "prompt_token_ids": list(map(ord, prompt)),
        "response_token_ids": list(map(ord, response)),
        "authorship_mask": mask or [1] * length,
        "senior_logprobs": [-1.0] * length,
        "junior_logprobs": [-1.5] * length,
        "finish_reason": "stop",
        "text": response,
        "reward": reward,
        "group_id": f"step-1/{prompt}",
        "sample_index": 0,
    } | others


def trajectory(*arguments, step=1, advantage=0.0, **others):
    return Trajectory(step, record(*arguments, **others), advantage)


def write_run(path, steps):
    """A run directory with the records of each step."""
    (path / "trajectories").mkdir(parents=True)
    (path / "run.json").write_text('{"run_id": "run-1", "kind": "train"}')
    for step, written in steps.items():
        text = "".join(json.dumps(one) + "\n" for one in written)
        (path / "trajectories" / f"step_{step}.jsonl").write_text(text)
    return path


def read_step(run, step):
    """The trajectories of a step."""
    [file] = [one for one in trajectory_files(run / STEPS) if one.step == step]
    return list(Chosen(file).read())


def test_a_range_holds_its_bounds(subtests):
    for text, inside, outside in [
        ("3", [3], [2.9, 3.1]),
        ("3:7", [3, 7], [2, 8]),
        (":-0.5", [-0.5, -100], [0]),
        ("-1:", [-1, 1e9], [-1.1]),
        (":", [-1e9, 1e9], []),
    ]:
        with subtests.test(text=text, inside=inside, outside=outside):
            numbers = Range.parse(text, "--reward")
            assert all(one in numbers for one in inside)
            assert not any(one in numbers for one in outside)


def test_what_is_no_range_is_named(subtests):
    for text in ["", "x", "1:2:3", "nan", "nan:", "2:1"]:
        with subtests.test(text=text):
            with pytest.raises(ConfigError, match=r"^--reward: ") as error:
                Range.parse(text, "--reward")
            assert repr(text) in str(error.value)


def test_filters_are_by_reward_and_text():
    right, wrong = Head("g", 1.0, "The Answer"), Head("g", 0.0, "no")
    failed = Head("g", None, "answer")
    everything = [right, wrong, failed]
    assert list(filter(Filter().admits, everything)) == everything
    assert list(filter(Filter(text="ANSWER").admits, everything)) == [right, failed]
    assert list(filter(Filter(reward=Range.parse("0.5:", "")).admits, everything)) == [right]
    assert list(filter(Filter(reward=Range.parse(":", "")).admits, everything)) == [right, wrong]


def test_an_advantage_is_the_distance_from_the_mean_of_its_own_group(tmp_path):
    rewards = [("a", 1.0), ("b", 5.0), ("a", 0.0), ("a", None), ("b", 5.0)]
    run = write_run(tmp_path, {1: [record(group, "x", reward=r) for group, r in rewards]})
    assert [one.advantage for one in read_step(run, 1)] == [0.5, 0.0, -0.5, None, 0.0]


def test_a_gap_is_senior_minus_junior_where_both_are_known():
    one = trajectory("p", "abc", senior_logprobs=[-1.0, None, -2.0], junior_logprobs=[-3, -1, -1])
    assert one.gaps == [2.0, None, -1.0]
    assert trajectory("p", "ab", junior_logprobs=None).gaps == [None, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"authorship_mask": [1]}, "authorship_mask: 1 entries for 2 response tokens"),
        ({"authorship_mask": [1, 3]}, "authorship_mask.1: "),
        ({"accepted_draft_mask": [1]}, "accepted_draft_mask: 1 entries for 2 response tokens"),
        ({"senior_logprobs": [0.0, float("nan")]}, "senior_logprobs.1: "),
        ({"junior_logprobs": [0.0] * 3}, "junior_logprobs: 3 entries for 2 response tokens"),
        ({"response_token_ids": ["5", 6]}, "response_token_ids.0: "),
        ({"prompt_token_ids": [2**40]}, "prompt_token_ids.0: "),
        ({"reward": "high"}, "reward: "),
        ({"text": None}, "text: "),
    ],
)
def test_a_damaged_record_is_named_by_line_and_key(tmp_path, change, message):
    run = write_run(tmp_path, {1: [record("p", "xy"), record("p", "xy") | change]})
    with pytest.raises(RunDirectoryError) as error:
        read_step(run, 1)
    place = tmp_path / "trajectories" / "step_1.jsonl"
    assert str(error.value).startswith(f"{place}:2: {message}")


def test_a_missing_key_and_a_line_that_is_no_json_are_named(tmp_path):
    lacking = record("p", "xy")
    del lacking["group_id"]
    run = write_run(tmp_path, {1: [lacking], 2: [record("p", "xy")]})
    with pytest.raises(RunDirectoryError, match=r"step_1\.jsonl:1: group_id: "):
        read_step(run, 1)
    with (run / "trajectories" / "step_2.jsonl").open("a") as file:
        file.write('{"prompt')
    with pytest.raises(RunDirectoryError, match=r"step_2\.jsonl:2: not JSON"):
        read_step(run, 2)


def test_runs_without_trajectories_say_why(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        recorded(tmp_path)
    run = write_run(tmp_path / "run", {})
    with pytest.raises(RunDirectoryError, match="no step has finished yet"):
        recorded(run)
    (run / "run.json").write_text('{"run_id": "run-1", "kind": "sft"}')
    with pytest.raises(RunDirectoryError, match="supervised training writes them only with"):
        recorded(run)


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    found = recorded(write_run(tmp_path, {10: [], 9: [], 1: []}))
    assert [one.step for one in found] == [1, 9, 10]


def test_texts_without_spaces_are_shown_to_their_end(subtests):
    for text in ["吾輩は猫である。" * 30, "https://example.org/" + "a1b2/" * 50]:
        for width in WIDTHS:
            with subtests.test(width=width, text=text):
                screen = Screen(width)
                print_trajectories(screen.output, Letters(), [trajectory(text, text)], "Step 1")
                assert max(map(cell_len, screen.lines)) <= width
                shown = "".join("".join(screen.lines).split())
                assert shown.count(text) == 3  # the group's name, the prompt and the response


def test_responses_stand_below_their_prompt():
    screen = Screen(60)
    rows = [
        trajectory("2 + 2?\n", "is 4", mask=[1, 1, 1, 0], reward=1.0, advantage=0.5),
        trajectory("2 + 2?\n", "5\nno", reward=None, advantage=None),
        trajectory("3 + 3?", "6"),
    ]
    print_trajectories(screen.output, Letters(), rows, "Step 1", advantage=True)
    assert screen.lines == [
        "Step 1: senior, [junior]",
        "step-1/2 + 2?\\n",
        "  2 + 2?",
        "  reward  advantage  response",
        "    1.00      +0.50  is [4]",
        "       -          -  5",
        "                     no",
        "step-1/3 + 3?",
        "  3 + 3?",
        "    0.50      +0.00  6",
    ]


ROW = {"place": "rows.jsonl:7", "row": {"answer": 4, "level": "easy"}}


def test_a_prompt_stands_with_its_row_and_a_response_with_its_scores():
    screen = Screen(60)
    one = trajectory("2 + 2?", "5", reward=-0.5, scores={"right": 0.0, "short": 0.5}, **ROW)
    print_trajectories(screen.output, Letters(), [one], "Step 1")
    assert screen.lines == [
        "Step 1: senior, [junior]",
        "step-1/2 + 2?  rows.jsonl:7",
        "  2 + 2?",
        "  answer: 4",
        "  level: easy",
        "  reward  right  short  response",
        "   -0.50   0.00   0.50  5",
    ]


def test_a_page_holds_rows_and_scores():
    scores = {"right": 0.0, "short": None}
    rows = [trajectory("p", "a", scores=scores, **ROW), trajectory("q", "b", scores={"one": 1.0})]
    [[first, second]] = Page(make_page(*rows)).steps
    assert (first["place"], first["columns"]) == (
        "rows.jsonl:7",
        [["answer", "4"], ["level", "easy"]],
    )
    assert first["samples"][0]["scores"] == scores
    # Files of earlier versions have no place; a single score is the reward itself.
    assert (second["place"], second["columns"], second["samples"][0]["scores"]) == (None, [], {})


def test_groups_of_two_steps_stay_apart_whatever_their_names():
    screen = Screen(60)
    name = "g\x1b[2J"
    rows = [trajectory("p", "a", step=1, group_id=name)]
    rows.append(trajectory("q", "b", step=2, group_id=name))
    print_trajectories(screen.output, Letters(), rows, "Steps 1 to 2")
    heads = [line for line in screen.lines if line.startswith(("g", "  p", "  q"))]
    assert heads == ["g\\x1b[2J", "  p", "g\\x1b[2J", "  q"]


def test_large_gaps_stand_behind_their_tokens():
    screen = Screen(80)
    logprobs = {"senior_logprobs": [-1.0, -1.0, None], "junior_logprobs": [-3.5, -1.5, -9.0]}
    row = trajectory("p", "abc", mask=[0, 0, 1], **logprobs)
    print_trajectories(screen.output, Letters(), [row], "Step 1", gap=True)
    assert screen.lines[0].endswith("{senior - junior log-prob} from 1 nat on")
    assert screen.lines[-1] == "    0.50  [a{+2.5}b]c"


DRAFTED = {"mask": [1, 1, 0, 0, 1], "accepted_draft_mask": [0, 1, 1, 0, 1]}


def test_accepted_drafts_are_marked_and_counted_where_they_are_asked_for():
    rows = [trajectory("p", "abcde", **DRAFTED), trajectory("p", "f")]
    screen = Screen(80)
    print_trajectories(screen.output, Letters(), rows, "Step 1", drafts=True)
    assert screen.lines == [
        "Step 1: senior, [junior], ‹accepted draft›",
        "step-1/p",
        "  p",
        "  reward  drafts  response",
        "    0.50       3  a‹b›[‹c›d]‹e›",
        "    0.50       -  f",
    ]
    screen = Screen(80)
    print_trajectories(screen.output, Letters(), rows, "Step 1")
    assert screen.lines[-2:] == ["    0.50  ab[cd]e", "    0.50  f"]


def test_a_page_knows_the_accepted_drafts():
    found = Page(make_page(trajectory("p", "abcde", **DRAFTED), trajectory("p", "f"), drafts=True))
    marks = [sample["accepted_draft_mask"] for sample in found.samples]
    assert marks == [DRAFTED["accepted_draft_mask"], None]
    assert found.run["drafts"] is True


def test_an_episode_is_shown_turn_by_turn():
    rows = [trajectory("p", "abcdef", mask=[1, 0, 2, 2, 0, 1]), trajectory("p", "g")]
    screen = Screen(80)
    print_trajectories(screen.output, Letters(), rows, "Step 1")
    assert screen.lines == [
        "Step 1: senior, [junior], «environment»",
        "step-1/p",
        "  p",
        "  reward  turns  response",
        "    0.50      2  a[b]«cd»[e]f",
        "    0.50      1  g",
    ]
    assert [sample["turns"] for sample in Page(make_page(*rows)).samples] == [2, 1]


def test_trajectories_are_plain_lines_without_a_terminal():
    screen = Screen(60, terminal=False)
    rows = [trajectory("a\tb" + "c" * 100, "x\ny", mask=[1, 0, 0], group_id="g0")]
    rows.append(trajectory("d", "z", reward=None, advantage=None, group_id="g1"))
    print_trajectories(screen.output, Letters(), rows, "Step 1", advantage=True)
    assert screen.lines == [
        "Step 1: senior, [junior]",
        "group\treward\tadvantage\tprompt\tresponse",
        "g0\t0.50\t+0.00\ta\\tb" + "c" * 100 + "\tx[\\ny]",
        "g1\t-\t-\td\tz",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_that_knows_ascii_alone_gets_escapes(terminal):
    code = (
        "from rich.console import Console\n"
        "from tandem.terminal.output import Output, use_any_encoding\n"
        "from tandem.view.terminal import print_trajectories\n"
        "from test_view import Letters, trajectory\n"
        "use_any_encoding()\n"
        f"output = Output(console=Console(force_terminal={terminal}, width=80))\n"
        "print_trajectories(output, Letters(), [trajectory('猫', 'ä')], 'Step 1')\n"
        "output.note('→')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"\\u732b" in done.stdout
    assert b"\\xe4" in done.stdout
    assert b"\\u2192" in done.stdout


class Page(HTMLParser):
    """A page as a browser parses it: its elements, and the JSON of its data."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.run = None
        self.steps = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if not data.strip():
            return
        tag, attributes = self.elements[-1]
        if tag == "script" and attributes.get("id") == "run":
            self.run = json.loads(data)
        elif tag == "script" and attributes.get("class") == "step":
            self.steps.append(json.loads(data))

    @property
    def samples(self):
        return [sample for step in self.steps for group in step for sample in group["samples"]]


def make_page(*trajectories, name="run", drafts=False):
    return page(About(name), Letters(), trajectories, advantage=False, gap=False, drafts=drafts)


NASTY = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>&lt;\"'`${1}{{ 1 }}{% x %}",
    "\0\x1b[2J\u202e\u2028\u2029\ud800\U0001f389\n\t",
)


def test_what_a_model_wrote_is_data_and_never_html():
    plain = Page(make_page(trajectory("p", "r")))
    for text in NASTY:
        row = {"place": text, "row": {text: text}, "scores": {text: 1.0, "b": 0.0}}
        found = Page(make_page(trajectory(text, text, group_id=text, **row), name=text))
        assert found.elements == plain.elements
        assert found.run["name"] == text
        [[group]] = found.steps
        assert (group["prompt"], group["group_id"]) == (text, text)
        assert "".join(group["samples"][0]["token_texts"]) == text


def test_a_page_asks_no_network_and_writes_no_html():
    html = make_page(trajectory("p", "r"))
    assert "default-src 'none'" in html
    for tag, attributes in Page(html).elements:
        assert tag != "link"
        assert not {"src", "href", "action"} & set(attributes)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "fetch("):
        assert word not in html


def test_the_script_of_a_page_finds_what_it_looks_for():
    html = make_page(trajectory("p", "r"))
    attributes = [attributes for _, attributes in Page(html).elements]
    ids = {one["id"] for one in attributes if "id" in one}
    fields = {one["name"] for one in attributes if "name" in one}
    assert ids >= set(re.findall(r'getElementById\("(\w+)"\)', html)) != set()
    assert fields >= set(re.findall(r"form\.elements\.(\w+)", html)) != set()
    assert fields >= set(re.findall(r'bound\("(\w+)"', html)) != set()


def test_a_page_has_a_block_for_each_step_and_its_groups():
    rows = [
        trajectory("p", "a", step=1, group_id="step-1/prompt-0"),
        trajectory("p", "b", step=1, group_id="step-1/prompt-0"),
        trajectory("q", "c", step=1, group_id="step-1/prompt-1"),
        trajectory("p", "d", step=2, group_id="step-2/prompt-0"),
    ]
    found = Page(make_page(*rows))
    sizes = [[(g["step"], g["prompt"], len(g["samples"])) for g in step] for step in found.steps]
    assert sizes == [[(1, "p", 2), (1, "q", 1)], [(2, "p", 1)]]
    assert Page(make_page()).steps == []


def test_every_file_of_the_package_is_installed_with_it():
    root = Path(package.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tandem"]
    installed = {file for pattern in patterns for file in root.glob(pattern)}
    others = {
        file
        for file in root.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc", ".pyi")
    }
    assert root / "view" / "page" / "page.js" in others
    assert others <= installed


def records_of(run, *steps):
    return [one for step in steps for one in records(run, step)]


def test_a_page_holds_what_the_run_recorded(run_file, tmp_path):
    tandem("train", run_file)
    run, file = tmp_path / "run", tmp_path / "page.html"
    # After a crash there may be a step that the resumed run repeats.
    (run / "trajectories" / "step_5.parquet").write_text("given up")
    tandem("train", run_file, "steps=5", "--resume")
    assert str(file) in tandem("view", run, "--output", file).stdout
    found = Page(file.read_text())
    records = records_of(run, 1, 2, 3, 4, 5)
    assert len(found.samples) == len(records) == 5 * 6
    keys = set(found.samples[0]) - {"token_texts", "advantage", "scores", "turns"}
    assert keys >= {"authorship_mask", "senior_logprobs", "junior_logprobs", "reward"}
    for sample, one in zip(found.samples, records, strict=True):
        assert {key: sample[key] for key in keys} == {key: one[key] for key in keys}
        assert "".join(sample["token_texts"]).replace("<eos>", "") == one["text"]
    groups = [group for step in found.steps for group in step]
    assert [group["group_id"] for group in groups] == [
        f"step-{step}/prompt-{prompt}" for step in range(1, 6) for prompt in range(3)
    ]
    said = {key: found.run[key] for key in ("name", "advantage", "drafts", "shade")}
    assert said == {"name": "run", "advantage": False, "drafts": False, "shade": "none"}


def test_view_shows_the_last_step_and_what_is_asked_for(run_file, tmp_path):
    tandem("train", run_file, "steps=3")
    run = tmp_path / "run"

    def shown(*options):
        out = tandem("view", run, "--json", *options).stdout
        return [json.loads(line) for line in out.splitlines()]

    assert shown() == records_of(run, 3)
    assert shown("--step", 1, "--count", 2) == records_of(run, 1)[:2]
    everything = records_of(run, 1, 2, 3)
    assert shown("--step", ":") == everything
    word = everything[0]["text"][:2]
    assert shown("--step", ":", "--text", word) == [
        one for one in everything if word in one["text"]
    ]
    assert shown("--step", ":", "--reward", "2:") == []
    plain = tandem("view", run, "--count", 4, "--advantage", "--gap").stdout.splitlines()
    assert plain[0].startswith("Step 3, 4 of 6 trajectories: senior, [junior], {senior")
    assert plain[1] == "group\treward\tadvantage\tprompt\tresponse"
    assert len(plain) == 6
    assert "holds steps 1 to 3" in tandem("view", run, "--step", 7, check=2).stderr
    assert "--step: 'x' is neither" in tandem("view", run, "--step", "x", check=2).stderr
    assert "--gap" in tandem("view", run, "--json", "--gap", check=2).stderr
    assert "--drafts" in tandem("view", run, "--json", "--drafts", check=2).stderr
    assert "holds no run" in tandem("view", tmp_path, check=2).stderr


def test_a_page_that_cannot_be_written_and_damage_leave_no_file(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    run, file = tmp_path / "run", tmp_path / "page.html"
    missing = tmp_path / "nowhere" / "page.html"
    assert str(missing) in tandem("view", run, "--output", missing, check=2).stderr
    damaged = run / "trajectories" / "step_1.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = tandem("view", run, "--output", file, check=2)
    assert f"tandem: {damaged}: " in done.stderr
    assert not file.exists()


def test_a_picture_shows_what_a_terminal_does(run_file, tmp_path):
    tandem("train", run_file, "steps=2")
    run, file = tmp_path / "run", tmp_path / "steps.svg"
    done = tandem("view", run, "--count", 2, "--output", file, "--json")
    assert json.loads(done.stdout) == {"picture": str(file)}
    svg = file.read_text()
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    assert "Step 2, 2 of 6 trajectories: senior, [junior]" in text
    assert re.findall(r"step-\d/prompt-\d", text) == ["step-2/prompt-0"]
    # A picture in a page may load nothing.
    assert "url(http" not in svg.replace('"', "")


def test_a_moved_tokenizer_can_be_named(run_file, tmp_path):
    tandem("train", run_file, "steps=1")
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    assert "tokenizer" in tandem("view", tmp_path / "run", check=2).stderr
    tandem("view", tmp_path / "run", "--tokenizer", moved)


def test_a_page_says_what_was_trained_and_how(run_file, tmp_path):
    tandem("train", run_file, "steps=3", "eval.every=2", "objective.kl_coefficient=0.1")
    found = about(tmp_path / "run")
    facts = dict(found.facts)
    assert facts["steps"] == "3 of 3"
    assert facts["method"] == "group-relative advantages, KL 0.1, 3 × 2 responses a step"
    assert {"trainer", "senior", "junior"} <= set(facts)
    assert [step for step, _ in found.curves["eval/solo/accuracy"]] == [0, 2, 3]
    assert [step for step, _ in found.curves["loss/total"]] == [1, 2, 3]
    page_file = tmp_path / "page.html"
    tandem("view", tmp_path / "run", "--output", page_file)
    run = Page(page_file.read_text()).run
    assert dict(run["facts"]) == facts
    assert run["curves"]["eval/solo/accuracy"] == [[0, 0.0], [2, 0.0], [3, 0.0]]
    # Trajectories are there without the rest.
    (tmp_path / "run" / "config.yaml").unlink()
    assert "method" not in dict(about(tmp_path / "run").facts)


def test_a_reward_s_curve_stands_for_the_loss_s(tmp_path):
    run = write_run(tmp_path, {})
    steps = [{"step": step, "reward/mean": step / 4, "loss/total": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    assert about(run).curves == {"reward/mean": [(1, 0.25), (2, 0.5)]}


def test_a_page_shows_prompts_with_their_special_tokens(run_file, tmp_path):
    tandem("train", run_file, "steps=1", "data.format='{prompt} <eos>'")
    page_file = tmp_path / "page.html"
    tandem("view", tmp_path / "run", "--output", page_file)
    [groups] = Page(page_file.read_text()).steps
    assert all(group["prompt"].endswith("<eos>") for group in groups)


def test_a_page_counts_the_tokens_of_an_image_and_shows_a_small_copy(tmp_path):
    Image.new("RGB", (600, 300), (255, 0, 0)).save(tmp_path / "red.png")
    (tmp_path / "no.png").write_text("no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "draft.tiff")
    said = About("run", images=("pictures", tmp_path))
    row = {"pictures": ["red.png", "no.png", "gone.png", "draft.tiff", "image"], "answer": 1}
    vision = [{"kind": "image", "digest": "d", "grid": [1, 2, 3], "seconds_per_grid": 0.0}]
    one = trajectory("a" + "#" * 40 + "bb", "x", row=row, vision_inputs=vision)
    plain = trajectory("#" * 40, "x", group_id="step-1/b")
    html = page(said, Letters(), [one, plain], advantage=False, gap=False, drafts=False)
    [[group, other]] = Page(html).steps
    assert group["prompt"] == "a#(× 40)bb"
    assert other["prompt"] == "#" * 40
    assert other["images"] == []
    [url] = group["images"]
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    small = Image.open(io.BytesIO(base64.b64decode(data)))
    assert small.size == (256, 128)
    assert small.getpixel((9, 9)) == (255, 0, 0)
    # A page loads pictures from itself alone.
    assert "img-src data:" in html
    assert about(write_run(tmp_path / "run", {})).images == ("images", Path())


def test_images_of_an_evaluation_are_those_of_its_rows(tmp_path):
    run = write_run(tmp_path, {})
    held_out = {"jsonl": "/b/held_out.jsonl", "images": "photo"}
    for config, train, evaluation in (
        ({"data": {"jsonl": "/a/rows.jsonl"}}, ("images", Path("/a")), ("images", Path("/a"))),
        (
            {"data": {"jsonl": "/a/rows.jsonl", "images": "pic"}, "eval": {"data": held_out}},
            ("pic", Path("/a")),
            ("photo", Path("/b")),
        ),
        ({"data": {"parquet": str(tmp_path)}}, ("images", tmp_path), ("images", tmp_path)),
    ):
        (run / "config.yaml").write_text(json.dumps(config))
        assert about(run).images == train
        assert about(run, evaluation=True).images == evaluation


def test_an_image_of_many_pixels_is_not_unpacked(tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    assert About("run", images=("p", tmp_path)).images_of({"p": "bomb.png"}) == []
