"""What draftloop adds to SGLang on a GPU: the attention backend `draftloop_flashinfer`."""
