"""Faults of the GPU's path, each put into the sources in turn: a test must fail of every one.

    .venv/bin/python tests/gpu/mutations.py [--build BUILD_DIR] [name ...]

A fault is a wait, a copy or a barrier that is missing, or a place that is off by one. The tests
run on simulated GPUs (tests/gpu/simulated) and emulated kernels (tests/gpu/emulated). A fault takes
some minutes, because it is built; its file is as before then, also after an interruption.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = "common/kernels/cuda"
_SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file`, `old` (once there) becomes `new`; `test` of ctest must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
    target: str = ""  # that is built; the test's name if empty

    def put(self, text: str) -> str:
        """Returns the text of the file with the fault."""
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: {self.file} has its text {text.count(self.old)} times")
        return text.replace(self.old, self.new)


_EMULATED = {"test": "emulated_kernels_test_with_20_seeds", "target": "emulated_kernels_test"}
MUTATIONS = [
    Mutation(
        "attention: no barrier behind the scores",
        f"{KERNELS}/attention.cu",
        "    tile.Score(a, start, begin, end, shared);\n    __syncthreads();\n",
        "    tile.Score(a, start, begin, end, shared);\n",
        **_EMULATED,
    ),
    Mutation(
        "attention: sums are exchanged into memory that is still read",
        f"{KERNELS}/attention.cu",
        "        results[round].Fold(partial);\n      }\n      __syncthreads();\n",
        "        results[round].Fold(partial);\n      }\n",
        **_EMULATED,
    ),
    Mutation(
        "attention: the last key of a split is left out",
        f"{KERNELS}/attention.cu",
        "end = min(end_key - start, kSplit);",
        "end = min(end_key - start, kSplit) - 1;",
        **_EMULATED,
    ),
    Mutation(
        "RMSNorm: no barrier before the warps' sums are read",
        f"{KERNELS}/layers.cu",
        "partial[threadIdx.x / 32] = squares;\n  __syncthreads();\n",
        "partial[threadIdx.x / 32] = squares;\n",
        **_EMULATED,
    ),
    Mutation(
        "rotation: the pair of a column is off by one",
        f"{KERNELS}/layers.cu",
        "Read(x, i + half) * sin[d]",
        "Read(x, i + half - 1) * sin[d]",
        **_EMULATED,
    ),
    Mutation(
        "fixed rows: in training rows attend together all the same",
        "common/ops/attention/device_attention.cc",
        "return ProductRows() > 0 && tables.prefixes == nullptr",
        "return ProductRows() < 0 && tables.prefixes == nullptr",
        test="gpu_passes_test",
    ),
    Mutation(
        "gradient of logits: bfloat16 overwrites logits that are not read yet",
        f"{KERNELS}/logits.cu",
        "    if (a.bfloat16) {\n      __syncthreads();\n",
        "    if (a.bfloat16) {\n",
        **_EMULATED,
    ),
    Mutation(
        "experts: a tile's operands are overwritten while they are read",
        f"{KERNELS}/grouped.cu",
        "    sums.Add(memory.lines, lines);\n    __syncthreads();\n",
        "    sums.Add(memory.lines, lines);\n",
        **_EMULATED,
    ),
    Mutation(
        "draws: the host reads them before they have arrived",
        "services/rollout/engine/models/device_sampler.cc",
        "  if (sent_.has_value()) sent_->synchronize();\n",
        "",
        test="rollout_engine_test_on_simulated_gpu",
        target="rollout_engine_test",
    ),
    Mutation(
        "a lane's stream: it does not wait for the work of the default stream",
        "services/rollout/engine/models/torch_runner.cc",
        "  before_->block(*stream_);\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "weights to the host: a buffer is read before its copies have arrived",
        "common/tensor/aten/host_copies.cc",
        "buffer.copied->synchronize();",
        "(void)buffer;",
        test="host_copies_test_on_simulated_gpu",
        target="host_copies_test",
    ),
    Mutation(
        "logits: the host waits once more in every pass",
        "services/rollout/engine/models/torch_runner.cc",
        "    draws.Send();\n    return absl::OkStatus();\n  });\n",
        "    draws.Send();\n    draws.Read();\n    return absl::OkStatus();\n  });\n",
        test="gpu_passes_test",
    ),
    Mutation(
        "graphs: a replay attends to as many items as the captured pass had room for",
        "common/ops/attention/device_attention.cc",
        "plan.counts.defined() ? plan.counts.const_data_ptr<int32_t>() : nullptr",
        "nullptr",
        test="gpu_passes_test",
    ),
    Mutation(
        "graphs: they outlive the weights that they read",
        "services/rollout/engine/models/torch_runner.h",
        "    if (graphs_.has_value()) graphs_->Forget();\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "graphs: rows of another pass stay in the padding",
        "common/model/passes/decode_buffers.cc",
        "  std::fill(block, longs(layout.blocks) + shape.rows, -1);\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "graphs: the numbers of a pass that waits are overwritten by those of the next one",
        "common/model/passes/decode_buffers.cc",
        "  filled_ = 1 - filled_;\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "a pass without rows: nobody waits for it",
        "services/rollout/engine/models/torch_runner.cc",
        "    if (!has_rows_) WaitForStream();\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "a pass ahead: a graph reads the tokens before they are drawn",
        "services/rollout/engine/models/decode_graphs.cc",
        "  if (drawn.defined()) buffers_.ReplaceTokens(key.shape, exact.rows, drawn);\n",
        "",
        test="gpu_passes_test",
    ),
    Mutation(
        "a pass ahead: the host reads the tokens of the wrong one of two passes",
        "services/rollout/engine/models/torch_runner.cc",
        "draws_[std::exchange(has_two_, false) ? 1 - newest_ : newest_].Read();",
        "draws_[std::exchange(has_two_, false) ? newest_ : 1 - newest_].Read();",
        test="gpu_passes_test",
    ),
    Mutation(
        "a pass ahead: an ended response gives its blocks back while the pass writes there",
        "services/rollout/engine/schedule/generator.cc",
        "sequence->running_passes > 0 || !sequence->complete()",
        "!sequence->complete()",
        test="rollout_schedule_test",
    ),
    Mutation(
        "a pass ahead: the block of its token is given back when the pass before ends",
        "services/rollout/engine/schedule/scheduler.cc",
        "  if (sequence.running_passes == 0) state.table.Shrink",
        "  state.table.Shrink",
        test="rollout_schedule_test",
    ),
    Mutation(
        "ranks: a group's operation does not wait for the tensors that it reads",
        "common/ranks/transport/staged_operation.cc",
        "  Order(Streams(device).getStream(device), stream_);\n",
        "",
        test="gpu_ranks_test",
    ),
    Mutation(
        "ranks: reduced gradients are added before they have arrived",
        "common/parallel/zero/zero_strategy.cc",
        "    buffer->reducing.Wait();\n",
        "",
        test="gpu_ranks_test",
    ),
    Mutation(
        "ranks: a block runs before it is gathered",
        "common/parallel/zero/zero_strategy.cc",
        "    buffer->gathering.Wait();\n    if (has_copies()",
        "    if (has_copies()",
        test="gpu_ranks_test",
    ),
    Mutation(
        "publication: memory is offered before the GPU has written it",
        "common/weights/gpu/gpu_copy.cc",
        "  device.synchronizeStream(device.getStream(bytes_.device()));\n",
        "",
        test="gpu_transfer_test_on_simulated_gpu",
        target="gpu_transfer_test",
    ),
    Mutation(
        "publication: tensors are packed over memory that is still in use",
        "common/weights/gpu/gpu_intake.cc",
        "  before.block(stream_);\n",
        "",
        test="gpu_transfer_test_on_simulated_gpu",
        target="gpu_transfer_test",
    ),
    Mutation(
        "publication: a GPU's sums leave out the bytes behind the last whole word",
        "common/weights/weights_digest.cc",
        "  if (rest > 0) {\n",
        "  if (rest > kWordBytes) {\n",
        test="gpu_transfer_test_on_simulated_gpu",
        target="gpu_transfer_test",
    ),
    Mutation(
        "publication to shards: what a rank has read is not compared with what was verified",
        "services/rollout/engine/ranks/shard_weights.cc",
        "    if (reader != nullptr) TANDEM_RETURN_IF_ERROR(reader->Finish());\n",
        "",
        test="rollout_ranks_test_on_simulated_gpu",
        target="rollout_ranks_test",
    ),
    Mutation(
        "publication from shards: the other ranks' parts are made again while they are read",
        "common/parallel/gpu_copies.cc",
        "ranks.size() == 1 || last_.expired()",
        "ranks.size() >= 1 || last_.expired()",
        test="gpu_copies_test_on_simulated_gpu",
        target="gpu_copies_test",
    ),
    Mutation(
        "publication from shards: a memory is read at the place in all of them",
        "common/tensor/aten/peer_memory.cc",
        "      offset = std::max<int64_t>(offset - shared()[i].size, 0);\n",
        "",
        test="gpu_transfer_test_on_simulated_gpu",
        target="gpu_transfer_test",
    ),
]


def try_one(mutation: Mutation, build: Path) -> str:
    """Returns what became of a fault: "caught", "NOT CAUGHT" or "DOES NOT BUILD"."""
    path = REPOSITORY / mutation.file
    before = path.read_text()
    path.write_text(mutation.put(before))
    try:
        target = mutation.target or mutation.test
        built = subprocess.run(
            ["cmake", "--build", str(build), "--target", target], capture_output=True
        )
        if built.returncode:
            return "DOES NOT BUILD"
        tested = subprocess.run(
            ["ctest", "--test-dir", str(build), "-R", f"^{mutation.test}$", "--timeout", "600"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if "No tests were found" in tested.stdout + tested.stderr:
            raise SystemExit(f"{mutation.name}: ctest has no test {mutation.test}")
        return "caught" if tested.returncode else "NOT CAUGHT"
    finally:
        path.write_text(before)


def main() -> int:
    """Tries the faults; returns the number of those that no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=REPOSITORY / "build/release")
    parser.add_argument("names", nargs="*", help="parts of the names of faults (default: all)")
    arguments = parser.parse_args()
    chosen = [
        m for m in MUTATIONS if not arguments.names or any(n in m.name for n in arguments.names)
    ]
    for mutation in chosen:  # before the first minute
        mutation.put((REPOSITORY / mutation.file).read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # puts the file back, as Control-C does
    missed = 0
    for mutation in chosen:
        result = try_one(mutation, arguments.build)
        missed += result != "caught"
        print(f"{result:>14}  {mutation.name}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
