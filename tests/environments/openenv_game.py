"""A game for the tests of OpenEnv: guess a number; behind the published protocol, and as a server of the real package.

`python openenv_game.py PORT` serves it with openenv-core; `serve_protocol` needs the package `websockets` alone.
"""

import asyncio
import base64
import contextlib
import io
import json
import sys
import threading

from PIL import Image


class Game:
    """Guess a number from 0 to 9, which the seed decides; the image has the color of the last hint."""

    def reset(self, seed=0, number=None):
        self.number = seed % 10 if number is None else number
        return self.observe("Guess a number from 0 to 9.", "gray"), None, False

    def step(self, guess):
        if guess < 0:
            raise RuntimeError("the game is broken")
        if guess == self.number:
            return self.observe("right", "green"), 1.0, True
        hint = "higher" if guess < self.number else "lower"
        return self.observe(hint, "red" if hint == "higher" else "blue"), 0.25, False

    def observe(self, text, color):
        image, buffer = Image.new("RGB", (64, 32), color), io.BytesIO()
        image.save(buffer, "PNG")
        picture = base64.b64encode(buffer.getvalue()).decode()
        return {"text": text, "picture": picture, "screen": list(image.tobytes()), "screen_shape": [32, 64, 3]}


# ---- the published protocol ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve_protocol(game=Game, max_sessions=4):
    """Serve the game from a thread by the messages of OpenEnv 0.3; yield the address."""
    from websockets.asyncio.server import serve

    ready, state = threading.Event(), {"sessions": 0}

    def error(code, message, **more):
        return {"type": "error", "data": {"message": message, "code": code, **more}}

    def answer(session, message):
        data = message["data"]
        if message["type"] == "step" and hasattr(session, "reply"):
            return session.reply  # whatever the test wants
        try:
            if message["type"] == "step" and not str(data["guess"]).lstrip("-").isdigit():
                problem = {"loc": ["guess"], "msg": "Input should be a valid integer"}
                return error("VALIDATION_ERROR", "Invalid message", errors=[problem])
            if message["type"] == "step":
                observation, reward, done = session.step(int(data["guess"]))
            else:
                observation, reward, done = session.reset(**data)
        except (RuntimeError, LookupError) as failure:
            return error("EXECUTION_ERROR", str(failure))
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    async def handle(connection):
        if state["sessions"] == max_sessions:
            await connection.send(json.dumps(error("CAPACITY_REACHED", "Server at capacity")))
            return
        state["sessions"] += 1
        try:
            session = game()
            async for text in connection:
                await connection.send(json.dumps(answer(session, json.loads(text))))
        finally:
            state["sessions"] -= 1

    async def main():
        async with serve(handle, "127.0.0.1", 0) as server:
            state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()
            state["port"] = server.sockets[0].getsockname()[1]
            ready.set()
            await state["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(300)
    try:
        yield f"http://127.0.0.1:{state['port']}"
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(300)


# ---- the real package ----------------------------------------------------------------------------------------------


def main(port):
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class GuessAction(Action):
        guess: int

    class GuessObservation(Observation):
        text: str
        picture: str
        screen: list[int]
        screen_shape: list[int]

    class GuessEnvironment(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, number=None):
            self.game = Game()
            return self.observe(self.game.reset(seed or 0, number))

        def step(self, action, timeout_s=None):
            return self.observe(self.game.step(action.guess))

        def observe(self, outcome):
            observation, reward, done = outcome
            return GuessObservation(**observation, reward=reward, done=done)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]))
