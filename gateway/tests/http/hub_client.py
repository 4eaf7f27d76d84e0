"""Hugging Face's client against a gateway, as against a text-embeddings-inference: `URL`. LangChain's and Haystack's use it, with the URL
of the server alone."""

import sys

import numpy
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

(url,) = sys.argv[1:]
for address in (url + "/embed", url):
    client = InferenceClient(model=address, token="none")
    one = client.feature_extraction("A man is eating food.")
    assert one.shape == (1, 384) and one.dtype == numpy.float32, one.shape
    many = client.feature_extraction(["A man is eating food.", "Someone has a meal."], truncate=True, normalize=True)
    assert many.shape == (2, 384)
    assert numpy.allclose(many[0], one[0], atol=1e-6)
    assert numpy.allclose(numpy.linalg.norm(many, axis=1), 1, atol=1e-5)
    # Haystack's defaults. The model's own modules give vectors of length 1.
    as_made = client.feature_extraction("A man is eating food.", truncate=True, normalize=False)
    assert numpy.allclose(as_made, one, atol=1e-6)
    try:
        client.feature_extraction("x", prompt_name="title")
    except HfHubHTTPError as refused:
        assert refused.response.status_code == 400 and "prompt_name" in refused.response.text
    else:
        raise AssertionError("a prompt that the gateway does not know")
