"""Who writes the texts of `nestpipe think`: a model on this machine, one behind an endpoint, or the template."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from nestpipe.cli.think_arguments import ThinkArguments
from nestpipe.errors import ConfigError
from nestpipe.generative.instruction_template import TemplateProvider
from nestpipe.generative.llm_provider import OpenAICompatibleProvider
from nestpipe.generative.local_model import find_weights, serve_local
from nestpipe.generative.prompt_builder import InstructionProvider


@contextmanager
def open_provider(arguments: ThinkArguments, template: TemplateProvider) -> Iterator[InstructionProvider]:
    """The provider that the flags name; a local model is served until the end of the block."""
    endpoint = arguments.endpoint
    if arguments.llm:
        if endpoint.url:
            raise ConfigError("--llm and --endpoint.url name two language models; leave one out.")
        with serve_local(find_weights(arguments.llm), num_threads=arguments.llm_threads) as model:
            own = dataclasses.replace(endpoint, url=model.url, model=endpoint.model or model.name, wait=True)
            yield OpenAICompatibleProvider(own.filled(is_local=True), api_key=model.api_key, template=template)
    elif endpoint.url:
        key = arguments.api_key_file.read_text().strip() if arguments.api_key_file else ""
        yield OpenAICompatibleProvider(endpoint, api_key=key, template=template)
    else:
        yield template
