"""A server of the Model Context Protocol over stdio, in a process of its own; its tool `book` writes to the folder given."""

import json
import sys
from pathlib import Path

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def result(method: str, params: dict) -> dict:
    if method == "initialize":
        about = {"name": "hotel", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [{"name": "book", "description": "Book a room.", "inputSchema": CITY}]}
    if method == "tools/call":
        city = params["arguments"]["city"]
        with (Path(sys.argv[1]) / "effects.txt").open("a") as file:
            file.write(f"book\t{city}\n")
        return {"content": [{"type": "text", "text": f"booked {city}"}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": result(asked["method"], asked.get("params", {}))}
        print(json.dumps(answer), flush=True)
