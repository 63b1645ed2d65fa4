"""An HTTP server with OpenAI's interface over `BatchEngine`. Needs the extra `serve`."""
