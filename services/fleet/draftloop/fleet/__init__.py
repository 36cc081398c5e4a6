"""draftloop.fleet"""
