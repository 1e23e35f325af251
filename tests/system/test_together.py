"""Many at once on the real tree: everybody streams, nobody waits for another to finish."""

import json
import threading
import time

import httpx
import pytest
from websockets.sync.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.model]


def test_sixteen_chats_all_stream_at_once(served):
    first, last, texts = [0.0] * 16, [0.0] * 16, [""] * 16
    ready = threading.Barrier(16)

    def talk(i: int) -> None:
        client = served.client()
        ready.wait()
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"Count from {i} upwards, in words."}],
            temperature=0,
            max_tokens=150,
            stream=True,
            extra_body={"ignore_eos": True, "fast_answers": "off"},
        )
        for chunk in stream:
            if chunk.choices[0].delta.content:
                first[i] = first[i] or time.monotonic()
                last[i] = time.monotonic()
                texts[i] += chunk.choices[0].delta.content

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts)
    assert max(first) < min(last), "somebody had their first token only after another had finished"


def test_a_websocket_client_gets_the_events_of_a_response(served):
    url = served.root.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=served.headers) as socket:
        for _ in range(2):
            socket.send(
                json.dumps(
                    {
                        "type": "response.create",
                        "model": "default",
                        "temperature": 0,
                        "fast_answers": "off",
                        "input": [{"role": "user", "content": "What is the capital of France?"}],
                    }
                )
            )
            events = [json.loads(socket.recv(timeout=60))]
            while events[-1]["type"] != "response.completed":
                events.append(json.loads(socket.recv(timeout=60)))
            text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
            assert text == "The capital of France is Paris."
            numbers = [e["sequence_number"] for e in events]
            assert numbers == sorted(set(numbers))
            assert events[0]["type"] == "response.created"
            assert events[-1]["response"]["status"] == "completed"


def test_health_says_ready_without_a_key(served):
    assert httpx.get(served.root + "/health/live").status_code == 200
    assert httpx.get(served.root + "/health/ready").status_code == 200
