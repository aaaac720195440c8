"""Decode and prefill of the engine beside transformers: decode.py BENCH MODELS ROWS.jsonl [--help]

Sides: solo; rows (solo with compute.product_rows 256); tandem (word, half of the words each, a
second model of the same shape); solo and tandem with captured graphs (solo-graphs, tandem-graphs);
transformers (generate, sampling); transformers-graph (static cache, a captured decode step,
sampling outside).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import work
from rows import Rows


class Engine:
    """The engine's benchmark program, which takes commands on its stdin."""

    def __init__(self, program: str, **settings: Any) -> None:
        command = [program, *[f"{k.replace('__', '.')}={v}" for k, v in settings.items()]]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the program)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answer()  # once the models are loaded

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(self._log.read()[-600:])
        return line

    def ask(self, command: str, *numbers: int) -> dict[str, Any]:
        """Runs `command` and returns its answer."""
        self._process.stdin.write(" ".join([command, *map(str, numbers)]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        """Ends the program."""
        self._process.stdin.close()
        self._process.wait(20)


class Decode:
    """The measurements of one type."""

    def __init__(self, args: argparse.Namespace, dtype: str, rows: Rows) -> None:
        self.args, self.dtype, self.rows = args, dtype, rows
        self.jobs = [tuple(map(int, job.split("x"))) for job in args.jobs.split(",")]
        suffix = "" if dtype == "bfloat16" else "-fp32"
        self.senior = f"{args.models}/{args.shape}{suffix}"
        self.junior = f"{args.models}/{args.shape}-junior{suffix}"
        self.config = json.loads((Path(self.senior) / "config.json").read_text())
        self.number = 2 if dtype == "bfloat16" else 4

    def row(self, side: str, job: tuple[int, ...], prefill: float, decode: float) -> None:
        """Adds the rates of a job of (sequences, prompt tokens, new tokens) that has just ended."""
        n, p, t = job
        self.rows.add(
            side=side,
            shape=self.args.shape,
            dtype=self.dtype,
            n=n,
            prompt=p,
            new=t,
            prefill_s=round(prefill, 4),
            decode_s=round(decode, 4),
            prefill_tok_s=round(n * p / prefill),
            decode_tok_s=round(n * (t - 1) / decode, 1),
            ms_per_step=round(1000 * decode / (t - 1), 3),
            step_bytes=work.decode_bytes(self.config, self.number, n, p + t / 2),
            prefill_operations=work.prefill_operations(self.config, n, p),
            ended=round(time.time(), 3),
        )

    def attempt(self, side: str, measure: Callable[[], None]) -> None:
        """Measures a side; an error becomes its row."""
        try:
            measure()
        except Exception as error:  # the other sides are measured all the same
            self.rows.add(side=side, dtype=self.dtype, error=repr(error)[:600])

    def engine(self, side: str) -> None:
        """Measures the engine with one model or two, eager or with captured graphs."""
        settings: dict[str, Any] = {
            "senior_model": self.senior,
            "max_num_seqs": max(job[0] for job in self.jobs),
            "max_model_len": max(job[1] + job[2] for job in self.jobs) + 8,
            "max_batched_tokens": 40000,
            "compute__device": self.args.device,
            "compute__dtype": self.dtype,
            "compute__num_threads": 1,
        }
        has_junior, has_graphs = side.startswith("tandem"), side.endswith("-graphs")
        if has_graphs:
            settings["senior__enforce_eager"] = "false"
        if has_junior:
            settings["junior_model"] = self.junior
            if has_graphs:
                settings["junior__enforce_eager"] = "false"
        if side == "rows":
            settings["compute__product_rows"] = 256
        if self.args.device == "cpu":
            settings["compute__kernels"] = "aten"
        begin = time.time()
        engine = Engine(self.args.program, **settings)
        self.rows.add(side=side, dtype=self.dtype, start_s=round(time.time() - begin, 2))
        command = "tandem" if has_junior else "time"
        engine.ask(command, 1, 16, 8)  # warms up
        for job in self.jobs:
            if has_graphs:
                engine.ask(command, job[0], 16, 8)  # captures its shapes
            got = engine.ask(command, *job)
            self.row(side, job, got["prefill"]["seconds"], got["decode"]["seconds"])
        engine.close()

    def transformers(self) -> None:
        """Measures transformers, eager and with a captured step."""
        import transformers

        transformers.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.senior, dtype=getattr(torch, self.dtype)
        )
        model = model.to(self.args.device).eval()
        for job in self.jobs:
            n, p, _ = job
            size = model.config.vocab_size
            ids = torch.randint(1000 % size, size, (n, p), device=self.args.device)
            if "transformers" in self.args.sides.split(","):
                self.attempt(
                    "transformers", lambda ids=ids, job=job: self.generate(model, ids, job)
                )
            if "graph" in self.args.sides.split(",") and self.args.device == "cuda":
                self.attempt(
                    "transformers-graph", lambda ids=ids, job=job: self.graph(model, ids, job)
                )

    def generate(self, model: Any, ids: torch.Tensor, job: tuple[int, ...]) -> None:
        """Measures generate()."""
        sync = torch.cuda.synchronize if self.args.device == "cuda" else (lambda: None)

        def run(tokens: int) -> float:
            sync()
            begin = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
            sync()
            return time.perf_counter() - begin

        run(2)
        first = min(run(1) for _ in range(2))
        self.row("transformers", job, first, run(job[2]) - first)

    @torch.inference_mode()
    def graph(self, model: Any, ids: torch.Tensor, job: tuple[int, ...]) -> None:
        """Measures a decode step that was captured as a CUDA graph."""
        from transformers import StaticCache

        n, p, t = job
        cache = StaticCache(config=model.config, max_cache_len=p + t + 8)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        positions = torch.arange(p, device=ids.device)[None]
        model(ids, past_key_values=cache, use_cache=True, position_ids=positions, logits_to_keep=1)
        torch.cuda.synchronize()
        prefill = time.perf_counter() - begin
        token = torch.zeros((n, 1), dtype=torch.long, device=ids.device)
        position = torch.full((1, 1), p, device=ids.device)
        takes_position = "cache_position" in model.forward.__code__.co_varnames
        extra = {"cache_position": position[0]} if takes_position else {}

        def step() -> None:
            got = model(
                token, past_key_values=cache, use_cache=True, position_ids=position, **extra
            )
            token.copy_(torch.multinomial(got.logits[:, -1].float().softmax(-1), 1))

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        begin = time.perf_counter()
        for i in range(t - 1):
            position.fill_(p + 2 + i)
            captured.replay()
        torch.cuda.synchronize()
        self.row("transformers-graph", job, prefill, time.perf_counter() - begin)


def main() -> None:
    """Measures every side in every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("program", "models", "rows"):
        parser.add_argument(name)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--jobs", default="1x128x64,16x128x64,64x128x32,256x128x16")
    parser.add_argument(
        "--sides", default="solo,solo-graphs,rows,tandem,tandem-graphs,transformers,graph"
    )
    args = parser.parse_args()
    rows = Rows(args.rows)
    for dtype in args.dtypes.split(","):
        decode = Decode(args, dtype, rows)
        sides = args.sides.split(",")
        for side in ("solo", "solo-graphs"):
            if side in sides:
                decode.attempt(side, lambda decode=decode, side=side: decode.engine(side))
        if "rows" in sides and args.device == "cuda":
            decode.attempt("rows", lambda decode=decode: decode.engine("rows"))
        if {"transformers", "graph"} & set(sides):
            decode.attempt("transformers", decode.transformers)
            if args.device == "cuda":
                torch.cuda.empty_cache()
        for side in ("tandem", "tandem-graphs"):
            if side in sides:
                decode.attempt(side, lambda decode=decode, side=side: decode.engine(side))
    sys.exit(rows.errors > 0)


if __name__ == "__main__":
    main()
