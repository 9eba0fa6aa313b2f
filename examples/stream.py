"""Text as it is written, and how to end early: closing the iterator cancels the request.

.venv/bin/python examples/stream.py
"""

from contextlib import closing

from shadowlane import LLM, SamplingParams
from shadowlane.models import resolve_model


def main() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=200)
    with (
        LLM(resolve_model("smollm2"), ram="64MiB") as llm,
        closing(llm.stream("Once upon a time", params)) as chunks,
    ):
        num_sentences = 0
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
            num_sentences += chunk.text.count(".")
            if num_sentences >= 2:
                break
    print()


if __name__ == "__main__":
    main()
