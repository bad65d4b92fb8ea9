"""A chat through kvflow with the official OpenAI client (`pip install openai`).

Start `kvflow up` first.

python examples/chat.py "What is a class?"            (KVFLOW_URL, default http://127.0.0.1:8000)
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("KVFLOW_URL", "http://127.0.0.1:8000") + "/v1", api_key="none"
)
question = " ".join(sys.argv[1:]) or "What is a class?"
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=64,
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
