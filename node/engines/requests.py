"""What every engine asks of a request before it samples."""

from node.interfaces import PromptRequest


class RequestTooLong(ValueError):
    """A prompt and its token budget do not fit the model's context."""


def check_request(request: PromptRequest, context: int, model: str) -> None:
    """Raises RequestTooLong, and ValueError for an empty prompt, a budget below 1 or a start that cannot go on."""
    if not request.prompt_ids or request.max_new_tokens < 1 or request.n < 1:
        raise ValueError(f"request {request.key}: prompt, max_new_tokens and n must not be empty or 0")
    total = len(request.prompt_ids) + request.max_new_tokens
    if total > context:
        raise RequestTooLong(
            f"request {request.key}: {len(request.prompt_ids)} prompt tokens and max_new_tokens "
            f"{request.max_new_tokens} exceed the context of {context} tokens of {model}; "
            "lower rollout.max_new_tokens or choose a shorter task"
        )
    if len(request.starts) > request.n:
        raise ValueError(f"request {request.key}: {len(request.starts)} starts, but n is {request.n}; raise n")
    for start in request.starts:
        if start.finish == "stop" or len(start.token_ids) >= request.max_new_tokens:
            raise ValueError(
                f"request {request.key}: a start of {len(start.token_ids)} tokens that ended by {start.finish} "
                f"has nothing to go on to with max_new_tokens {request.max_new_tokens}; leave it out"
            )
