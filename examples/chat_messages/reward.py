"""Judges the answer to the last turn of a conversation."""

import asyncio


async def reward(prompt: list[dict], response: str, name: str, **row: object) -> float:
    """Returns 1 for the user's name in few words, less where it stands in many."""
    judged = await ask_judge(prompt[-1]["content"], response, name)
    return judged / (1 + len(response.split()) // 4)


async def ask_judge(question: str, answer: str, truth: str) -> float:
    """Stands for a call to a model of your own, which answers after a while."""
    await asyncio.sleep(0.01)
    return float(truth.lower() in answer.lower())
