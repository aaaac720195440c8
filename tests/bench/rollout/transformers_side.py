"""`transformers.generate` as a side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from rollout.turns import Job, Moment, Turn


class _FirstToken(StoppingCriteria):
    """Stops nothing; it notes when the first tokens are there."""

    def __init__(self) -> None:
        self.moment: Moment | None = None

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.moment = self.moment or Moment.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersSide:
    """Samples in this process, with all of libtorch's threads."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def run(self, job: Job) -> Turn:
        """Does the job."""
        generator = torch.Generator().manual_seed(0)
        shape = (job.sequences, job.prompt_tokens)
        prompts = torch.randint(1000, 20000, shape, generator=generator)
        first = _FirstToken()
        begin = Moment.now()
        with torch.inference_mode():
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=job.new_tokens,
                max_new_tokens=job.new_tokens,
                pad_token_id=0,
                stopping_criteria=[first],
            )
        end = Moment.now()
        assert first.moment is not None
        return Turn(job, first.moment - begin, end - first.moment)
