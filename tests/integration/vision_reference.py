"""Results of `transformers` for prompts with images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tandem.rpc.images import VisionInput


class VisionReference:
    """A vision-language model of `transformers`, by default in float32, one sequence at a time."""

    def __init__(self, directory: Path, family: str, dtype: str = "float32") -> None:
        import transformers

        kind = getattr(transformers, f"{family}ForConditionalGeneration")
        self.model = kind.from_pretrained(directory, dtype=dtype).eval()
        self._has_seconds = family == "Qwen2_5_VL"

    def logits(self, tokens: Sequence[int], images: Sequence[VisionInput]) -> Any:
        """Returns the logits of every token, [T, V]."""
        return self.model.lm_head(self.hidden(tokens, images))

    def hidden(self, tokens: Sequence[int], images: Sequence[VisionInput]) -> Any:
        """Returns what the head reads of every token, [T, H]."""
        import torch

        arguments: dict[str, Any] = {}
        for kind, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            chosen = [image for image in images if image.kind == kind]
            if not chosen:
                continue
            arguments[pixels] = torch.tensor(np.concatenate([one.pixels for one in chosen]))
            arguments[grid] = torch.tensor([one.grid for one in chosen])
            if kind == "video" and self._has_seconds:
                seconds = [one.seconds_per_grid for one in chosen]
                arguments["second_per_grid_ts"] = torch.tensor(seconds)
        ids = torch.tensor([list(tokens)])
        config = self.model.config
        is_image, is_video = ids == config.image_token_id, ids == config.video_token_id
        arguments["mm_token_type_ids"] = is_image.int() + 2 * is_video.int()
        return self.model.model(ids, use_cache=False, **arguments).last_hidden_state[0]

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], images: Sequence[VisionInput]
    ) -> np.ndarray:
        """Returns the log-probabilities of a response."""
        import torch

        with torch.no_grad():
            logits = self.logits([*prompt, *response], images)[len(prompt) - 1 : -1].double()
        labels = torch.tensor(list(response)).unsqueeze(1)
        return torch.log_softmax(logits, -1).gather(1, labels).squeeze(1).numpy()

    def greedy(self, prompt: Sequence[int], images: Sequence[VisionInput], count: int) -> list[int]:
        """Returns the `count` most likely tokens behind a prompt, one after the other."""
        import torch

        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(self.logits(tokens, images)[-1].argmax()))
        return tokens[len(prompt) :]
