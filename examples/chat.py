"""Two turns of a conversation; the second computes only its own tokens.

.venv/bin/python examples/chat.py
"""

from shadowlane import LLM, SamplingParams
from shadowlane.models import resolve_model

QUESTIONS = ["Name a river in Egypt.", "And one in Brazil?"]


def main() -> None:
    params = SamplingParams(max_tokens=64)
    messages: list[dict[str, str]] = []
    with LLM(resolve_model("smollm2"), ram="128MiB") as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, params)
            messages.append({"role": "assistant", "content": answer.text})
            print(f"> {question}\n{answer.text}\n  ({answer.prompt_tokens} tokens of prompt)")


if __name__ == "__main__":
    main()
