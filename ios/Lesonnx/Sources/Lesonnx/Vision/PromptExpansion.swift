import LesonnxScheduler

// From a prompt with placeholders, and pictures, to tokens and where the pictures are among them.
extension ModelBundle {
    /// The tokens of a text. Throws `input` where it has not one placeholder a picture, or the bundle has no eyes.
    func expand(
        _ text: String, _ images: [Picture], _ tokenizer: any Tokenizer, addSpecialTokens: Bool
    ) throws -> (tokenIds: [Int], pictures: PromptPictures?) {
        guard let vision = try images.isEmpty ? manifest.vision : eyes() else {
            return (try tokenizer.encode(text, addSpecialTokens: addSpecialTokens), nil)
        }
        let views = try views(of: images, vision)
        let tokens = try tokenizer.encode(vision.expand(text, views), addSpecialTokens: addSpecialTokens)
        return (tokens, images.isEmpty ? nil : try PromptPictures(tokens, images, views: views, vision))
    }

    /// The tokens of a prompt in ids, of which one is an image token for each picture. Throws `input` where there are others, or the
    /// bundle has no eyes.
    func expand(
        _ tokenIds: [Int], _ images: [Picture], _ tokenizer: (any Tokenizer)?
    ) throws -> (tokenIds: [Int], pictures: PromptPictures?) {
        if images.isEmpty {
            return (tokenIds, nil)
        }
        let vision = try eyes()
        guard let tokenizer else {
            throw LesonnxError.input("\(directory.lastPathComponent): has no tokenizer, so token ids cannot go with pictures")
        }
        let count = tokenIds.count { $0 == vision.tokens.image }
        if count != images.count {
            throw LesonnxError.input(
                "the prompt's ids hold the image token \(vision.tokens.image) \(count) times, expected once a picture: \(images.count)")
        }
        let views = try views(of: images, vision)
        var (tokens, number): ([Int], Int) = ([], 0)
        for id in tokenIds {
            if id == vision.tokens.image {
                tokens += try tokenizer.encode(vision.expansion(of: views[number], number: number), addSpecialTokens: false)
                number += 1
            } else {
                tokens.append(id)
            }
        }
        return (tokens, try PromptPictures(tokens, images, views: views, vision))
    }

    /// A message with the placeholders of its pictures before its text. Throws `input` where pictures cannot stand there.
    func marked(_ message: ChatMessage) throws -> ChatMessage {
        if message.images.isEmpty {
            return message
        }
        if message.role != .user {
            throw LesonnxError.input("a message of the role \(message.role.rawValue) has a picture, expected only a user's")
        }
        let text = try eyes().message(message.content, numPictures: message.images.count)
        return ChatMessage(role: message.role, content: text)
    }

    private func views(of images: [Picture], _ vision: VisionRecord) throws -> [[PictureView]] {
        try images.map { try vision.views(height: $0.height, width: $0.width) }
    }
}
